"""A torch.compile backend around another, in the user's own run."""
