"""Paired rounds, and the sign e-process that says when one route is proven faster than another."""
