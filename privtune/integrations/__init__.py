"""What makes training with other libraries a declared mechanism."""
