"""What a rank holds in a step: the forecast of memory, without and with stages."""
