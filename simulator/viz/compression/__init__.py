"""When compression pays: read `compression`."""
