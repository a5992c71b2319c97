"""What checks and times a model and its faster versions: the error rule, honesty, what a call must leave as it was, times, charts, records."""
