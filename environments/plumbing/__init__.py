"""What environments need: names, options, checks, data sets, tools."""
