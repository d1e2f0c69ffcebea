"""Pulls of rows of tables."""
