"use strict";
follow(() => false);
