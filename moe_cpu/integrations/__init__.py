"""Adapters to other projects. Each is imported by those who want it, and none is imported by the rest of the package."""
