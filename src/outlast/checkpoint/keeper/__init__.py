"""The keeper: a process without torch that writes a trainer's copies in shared memory.

`KeeperClient._change` guards all of the client; no thread waits for the keeper or the disk while
it holds the lock. States of its connection, which its supervisor's thread alone changes:

| `_end` | `_dying` | state                                  | next                              |
|--------|----------|----------------------------------------|-----------------------------------|
| set    | none     | a keeper serves                        | lost, or stuck in a save: dying   |
| none   | set      | a lost keeper may still read arenas    | reaped: none                      |
| none   | none     | no keeper                              | replaced for open saves; finished |
"""
