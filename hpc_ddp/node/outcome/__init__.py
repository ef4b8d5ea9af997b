"""How an attempt has ended, and what follows."""
