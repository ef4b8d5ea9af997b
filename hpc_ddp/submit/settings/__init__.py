"""From options and files to the settings of a job."""
