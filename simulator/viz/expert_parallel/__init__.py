"""Where tokens go among experts: read `routing`, first what is counted, then how it is drawn."""
