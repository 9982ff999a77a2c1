"""A user's own training loop under a plan: what it does is checked, not believed."""
