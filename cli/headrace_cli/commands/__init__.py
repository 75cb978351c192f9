"""The subcommands of `headrace`, one module each, and their shared options. What they run is in the other folders."""
