"""What a CPU cannot run: skipped, with the reason, where there is no GPU."""
