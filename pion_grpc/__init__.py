"""pion-grpc: keeps what a language model has already computed and gives it to the next request.

The layers, and the only imports allowed between them::

    server → {rpc, resp} → core → {storage, backends} → {pion_wire, errors}
"""

__version__ = "0.1.0"
