"""The parts of HTTP that all APIs share: answers, errors, streams, keys, and the routes of the operator."""
