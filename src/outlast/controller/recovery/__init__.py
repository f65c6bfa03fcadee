"""Recovery from a failure: close the generation, decide, and open the next one."""
