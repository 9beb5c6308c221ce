"""The command `tritoncaps`."""


def main() -> int:
    """Commands come with the training loop."""
    return 0
