//! Makes the desired pods so.
