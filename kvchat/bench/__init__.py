"""Measurements: `run` takes them, `result` holds them as JSON, `report` draws them."""
