"""Notifications: messages to webhooks, Slack and PagerDuty at incidents and at the run's end."""
