"""The loader: a source becomes operators. `inline_loader.load` is its face."""
