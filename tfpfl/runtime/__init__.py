"""Where rounds run: TFF workers that belong to us."""
