"""Run programs under supervision: none of their processes outlives the run."""
