"""The benchmark commands: `ropeway bench serve | throughput | latency | startup`.

Each command is a module of its own name; cli imports it only when it is called. `serve` has a `command` (a click.Command
whose callback returns the exit code). The others run an engine, so they have `flags()`, to which cli adds the engine's,
`DEFAULTS` for some of those, `HELP`, and `run(config, flags, parts)`. Must not know: torch, how the server works inside.
Called by: cli.
"""
