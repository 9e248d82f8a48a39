"""Tests; a package, so that another installed `tests` never takes its place."""
