"""What the public modules share; not for users."""
