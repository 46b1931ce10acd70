"""Messages and collectives: rings step by step, races between algorithms, fits of links.

Read `ring` and `ring_record`, then `messages` and `message_record`, `race` and `race_times`, `link_times`,
`fit_picture`. `ring_panel` and `race_panel` are widgets.
"""
