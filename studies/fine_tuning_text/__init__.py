"""What fine-tunes a small language model on labelled texts best, at one ε."""
