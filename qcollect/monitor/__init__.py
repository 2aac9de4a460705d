"""Run files and a clock -> a snapshot of the run -> what a terminal shows; reads only, never signals."""
