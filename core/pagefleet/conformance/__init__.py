"""The conformance kit: what a backend must do, as tests a vendor runs on their own device.

    pytest --pyargs pagefleet.conformance --target-device NAME

It finds the backend as the engine does, knows no device by name, and holds it to a dense float64 reference that
shares no code with any backend. What a backend says in `Traits` it cannot do is skipped, with that reason.
"""
