"""Shipped configuration files."""
