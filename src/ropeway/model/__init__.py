"""The model room: configuration, layers, weights. It imports attention and nothing above itself."""
