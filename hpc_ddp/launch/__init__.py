"""What runs on the login node before the job does. Never imports torch."""
