"""What is on the disk: the folder of a run, and the models that it begins with."""
