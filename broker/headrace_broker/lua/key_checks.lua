-- Finds keys of the wrong type before a script writes. Redis does not undo the writes of a script that fails midway. A
-- key that does not exist is valid. Each key is checked once per call. A script with a line `RIGHTS` also checks the
-- user's rights (`scripts.py`). For other reasons (no memory, a replica, a full disk) Redis refuses the first write of
-- a script, and never a later one.

local kinds = {}

-- Returns the type of a key at the time of the first check.
local function kind_of(key)
  local kind = kinds[key]
  if not kind then
    kind = redis.call('TYPE', key).ok
    kinds[key] = kind
  end
  return kind
end

-- Returns the problem of a key as a message, or nil.
local function problem_of(key, kind)
  local found = kind_of(key)
  if found == kind or found == 'none' then return nil end
  return string.format('WRONGTYPE the key %s holds a %s, not a %s: restore or delete it',
    string.gsub(key, '%c+', ' '), found, kind)
end

local function is_finite(value)
  return type(value) == 'number' and value == value and math.abs(value) < math.huge
end

-- Returns the number in a reply of Redis, or `otherwise` if it is not a number: the value may have been edited by hand.
local function number_in(reply, otherwise)
  local value = tonumber(reply or nil)
  return is_finite(value) and value or otherwise
end
