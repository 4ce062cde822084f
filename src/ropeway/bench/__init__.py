"""The benchmark commands: `ropeway bench serve | throughput | latency | startup`.

Each command is a module of its own name with a `command` (a click.Command whose callback returns the exit code); cli
imports it only when it is called. Must not know: torch, how the server works inside. Called by: cli.
"""
