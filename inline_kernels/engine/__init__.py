"""From a model and an input to what runs."""
