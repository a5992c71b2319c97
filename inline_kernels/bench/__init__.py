"""What checks and times a model and its faster versions: the error rule, honesty, times, charts, records."""
