"""What a rank really holds, by kind and over time: read `measured`."""
