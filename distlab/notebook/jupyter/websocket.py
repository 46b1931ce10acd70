"""The connection between a notebook's page and its kernel, without waiting to fill packets.

Jupyter Server leaves Nagle's algorithm on: a small message waits until the page has acknowledged the one before, which
a browser does up to 40 ms late. A widget's change is two or three small messages, so a slider lagged by that much.
Source: RFC 896 (why packets are filled), RFC 1122 section 4.2.3.2 (why acknowledgements come late).
"""

from __future__ import annotations

from typing import Any

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection


class PromptConnection(ZMQChannelsWebsocketConnection):
    """Jupyter's own connection; each message leaves at once."""

    def connect(self) -> Any:
        """Connect the page to the kernel's channels."""
        self.websocket_handler.set_nodelay(True)
        return super().connect()
