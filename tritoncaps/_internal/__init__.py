"""Code that the public modules share; not for users."""
