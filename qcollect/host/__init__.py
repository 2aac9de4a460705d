"""This machine: processes, devices, disks and versions; the only reader of the environment in the control program."""
