"""A model's pass over one record, watched, captured and made cheaper."""
