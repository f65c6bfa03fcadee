"""Pages of a lake: its report with controls, its nodes, and its rates for the planner."""
