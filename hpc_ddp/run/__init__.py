"""What a run is: its job, its folder, its journal. Standard library only; runs everywhere."""
