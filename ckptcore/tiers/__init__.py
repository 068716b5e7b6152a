"""Durable roots beside the one that a manager saves to, and the uploads to them."""
