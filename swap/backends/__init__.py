"""One file per I/O method."""
