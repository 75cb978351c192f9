-- Finds keys of the wrong type before a script writes. A script that fails midway takes nothing back, and would lose the
-- message that it moves. A key that does not exist is right. Each key is looked at once a call. What else Redis may
-- refuse (no memory, a replica, a full disk) it refuses at a script's first write, and never behind it.

local kinds = {}

-- What a key held when it was first asked for.
local function kind_of(key)
  local kind = kinds[key]
  if not kind then
    kind = redis.call('TYPE', key).ok
    kinds[key] = kind
  end
  return kind
end

-- What is wrong with a key, or nil.
local function problem_of(key, kind)
  local found = kind_of(key)
  if found == kind or found == 'none' then return nil end
  return string.format('WRONGTYPE the key %s holds a %s, not a %s: restore or delete it',
    string.gsub(key, '%c+', ' '), found, kind)
end

local function is_finite(value)
  return type(value) == 'number' and value == value and math.abs(value) < math.huge
end

-- The number that a reply of Redis says, or `otherwise`: somebody may have written any text there.
local function number_in(reply, otherwise)
  local value = tonumber(reply or nil)
  return is_finite(value) and value or otherwise
end
