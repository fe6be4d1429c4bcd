"""Files on the disk: the folder of a run, and the models that runs begin with."""
