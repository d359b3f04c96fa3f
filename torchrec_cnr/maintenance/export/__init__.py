"""Exports as plain files."""
