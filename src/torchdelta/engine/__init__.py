"""What every face calls: it composes the layers below and returns a Report."""
