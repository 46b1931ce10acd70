"""Messages and collectives: `ring` step by step, `messages` between ranks, a `race` of algorithms, fits of `links`."""
