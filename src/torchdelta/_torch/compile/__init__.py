"""torch.compile from inside: dynamo, AOTAutograd, inductor's passes, settings."""
